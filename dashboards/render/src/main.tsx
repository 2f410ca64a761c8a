// The page: one dashboard, selected by its URL: `?dashboard=PATH&from=TIME&to=TIME&scrape=SECONDS&var-NAME=VALUE`.
import './boot';
import { ThemeContext, type GrafanaTheme2 } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { LocationServiceProvider, locationService } from '@grafana/runtime';
import { registerRuntimeDataSource, type EmbeddedScene } from '@grafana/scenes';
import { GlobalStyles, PortalContainer } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { prepareHost } from './host';
import { registerPanels } from './panels';
import { PrometheusSource } from './prometheus';
import { report } from './report';
import { sceneOf, type Dashboard, type View } from './scene';

const asked = new URLSearchParams(location.search);

function view(): View {
  const chosen = [...asked].flatMap(([name, value]) =>
    name.startsWith('var-') ? [[name.slice(4), value]] : []
  );
  return { from: asked.get('from')!, to: asked.get('to')!, chosen: Object.fromEntries(chosen) };
}

async function show() {
  const source = new PrometheusSource(Number(asked.get('scrape')));
  registerRuntimeDataSource({ dataSource: source });
  const theme = prepareHost(source, 'dark');
  registerPanels();
  await initPluginTranslations('grafana-scenes');
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 14px Inter`)));
  const dashboard: Dashboard = await (await fetch(asked.get('dashboard')!)).json();
  const scene = sceneOf(dashboard, view());
  const root = document.getElementById('root')!;
  report.watch(scene, root);
  createRoot(root).render(<Page title={dashboard.title} scene={scene} theme={theme} />);
}

function Page({ title, scene, theme }: { title: string; scene: EmbeddedScene; theme: GrafanaTheme2 }) {
  const { background, text } = theme.colors;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <MemoryRouter>
        <LocationServiceProvider service={locationService}>
          <main style={{ background: background.canvas, color: text.primary, padding: 16 }}>
            <h4>{title}</h4>
            <scene.Component model={scene} />
          </main>
          <PortalContainer />
        </LocationServiceProvider>
      </MemoryRouter>
    </ThemeContext.Provider>
  );
}

show().catch((error) => report.problems.push(String(error?.stack ?? error)));
