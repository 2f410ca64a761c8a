// Sets the globals that Grafana's own page sets before any of its packages runs; imported first.

Object.assign(window, {
  __grafana_public_path__: '/public/',
  grafanaBootData: {
    settings: {
      appSubUrl: '',
      appUrl: '/',
      buildInfo: { edition: 'Open Source', env: 'production', version: '13.2.3' },
      datasources: {},
      defaultDatasource: 'prometheus',
      featureToggles: {},
      panels: {},
    },
    user: { language: 'en-US', lightTheme: false, locale: 'en-US', orgRole: 'Viewer', timezone: 'utc' },
    navTree: [],
  },
});

export {};
