// Bundles the page and Grafana's packages into dist/, which the command serves.
import { build } from 'esbuild';
import { copyFileSync, cpSync, mkdirSync, rmSync } from 'node:fs';

const PACKAGES = 'node_modules';
// The folder in which Grafana's style sheet looks for its font; the packages do not include the font.
const FONTS = {
  'Inter-Regular.woff2': 'inter-latin-400-normal.woff2',
  'Inter-Medium.woff2': 'inter-latin-500-normal.woff2',
};

rmSync('dist', { recursive: true, force: true });
mkdirSync('dist/public/fonts/inter', { recursive: true });

await build({
  entryPoints: ['src/main.tsx'],
  outfile: 'dist/main.js',
  bundle: true,
  minify: true,
  format: 'iife',
  target: 'chrome120',
  jsx: 'automatic',
  logLevel: 'warning',
  define: { global: 'window', 'process.env.NODE_ENV': '"production"', 'process.env': '{}' },
  loader: {
    '.png': 'dataurl',
    '.svg': 'dataurl',
    '.ttf': 'dataurl',
    '.woff': 'dataurl',
    '.woff2': 'dataurl',
  },
  alias: {
    // It probes for exports that a host may lack, which esbuild refuses.
    '@grafana/plugin-compat/datasources': './src/plugin-compat.ts',
    // The bridge between two releases of the router; this page has only one.
    'react-router-dom-v5-compat': 'react-router-dom',
  },
});

for (const [wanted, found] of Object.entries(FONTS)) {
  copyFileSync(`${PACKAGES}/@fontsource/inter/files/${found}`, `dist/public/fonts/inter/${wanted}`);
}
cpSync(`${PACKAGES}/@grafana/ui/dist/public/img`, 'dist/public/build/img', { recursive: true });
copyFileSync('src/index.html', 'dist/index.html');
