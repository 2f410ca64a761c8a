// Sets up the registries and services that Grafana's application provides to its packages.
import {
  booleanOverrideProcessor,
  createTheme,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  EventBusSrv,
  FieldColorModeId,
  identityOverrideProcessor,
  LoadingState,
  numberOverrideProcessor,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
  type DataQueryRequest,
  type DataSourceApi,
  type FieldConfigPropertyItem,
  type GrafanaTheme2,
  type PanelData,
  type TransformerRegistryItem,
} from '@grafana/data';
import {
  config,
  setAppEvents,
  setBackendSrv,
  setDataSourceSrv,
  setEchoSrv,
  setPluginImportUtils,
  setRunRequest,
  type BackendSrv,
  type DataSourceSrv,
} from '@grafana/runtime';
import { from, of, type Observable } from 'rxjs';
import { catchError, map, startWith } from 'rxjs/operators';
import drawn from './drawn.json';
import { UID } from './prometheus';

/** Set everything up for a data source; returns the theme. */
export function prepareHost(source: DataSourceApi, mode: 'dark' | 'light'): GrafanaTheme2 {
  const theme = createTheme({ colors: { mode } });
  config.theme2 = theme;
  standardFieldConfigEditorRegistry.setInit(fieldOptions);
  standardEditorsRegistry.setInit(() => []);
  standardTransformersRegistry.setInit(transformers);
  setAppEvents(new EventBusSrv());
  setRunRequest(run);
  setDataSourceSrv(services(source));
  setEchoSrv({ addBackend() {}, addEvent() {}, flush() {}, onInteraction: () => () => {} });
  setBackendSrv({ get: nobody, fetch: nobody } as unknown as BackendSrv);
  setPluginImportUtils({ importPanelPlugin: nobody, getPanelPluginFromCache: () => undefined });
  return theme;
}

const PROCESSORS: Record<string, unknown> = {
  boolean: booleanOverrideProcessor,
  dataLinks: dataLinksOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  identity: identityOverrideProcessor,
  number: numberOverrideProcessor,
  string: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  unit: unitOverrideProcessor,
  valueMappings: valueMappingsOverrideProcessor,
};
const DEFAULTS: Record<string, unknown> = {
  color: { mode: FieldColorModeId.Thresholds },
  mappings: [],
};

/** The options that fields of every panel have; Grafana's application registers them with their editors. */
function fieldOptions(): FieldConfigPropertyItem[] {
  return Object.entries(drawn.fields).map(([id, kind]) => {
    const item = { id, path: id, name: id, process: PROCESSORS[kind], defaultValue: DEFAULTS[id] };
    return { ...withoutEditor, ...item } as FieldConfigPropertyItem;
  });
}

/** Properties that the registry of field options requires and a picture does not use. */
export const withoutEditor = {
  editor: () => null,
  override: () => null,
  settings: {},
  shouldApply: () => true,
};

function transformers(): TransformerRegistryItem[] {
  const byId = new Map(Object.values(standardTransformers).map((one) => [one.id, one]));
  return [...byId.values()].map((one) => ({
    id: one.id,
    name: one.name,
    transformation: async () => one,
    editor: () => null,
    imageDark: '',
    imageLight: '',
  })) as unknown as TransformerRegistryItem[];
}

function services(source: DataSourceApi): DataSourceSrv {
  const settings = { ...source, name: 'Prometheus', uid: UID, isDefault: true };
  return {
    get: async () => source,
    getInstanceSettings: () => settings,
    getList: () => [settings],
    reload: () => {},
  } as unknown as DataSourceSrv;
}

/** Emits loading, then the data or the error. */
function run(source: DataSourceApi, request: DataQueryRequest): Observable<PanelData> {
  const about = { request, series: [], timeRange: request.range };
  return from(source.query(request)).pipe(
    map(({ data, errors = [] }): PanelData => {
      const state = errors.length > 0 ? LoadingState.Error : LoadingState.Done;
      return { ...about, state, series: data, error: errors[0], errors };
    }),
    catchError((error) => of({ ...about, state: LoadingState.Error, error: { message: String(error) } })),
    startWith({ ...about, state: LoadingState.Loading })
  );
}

function nobody(): Promise<never> {
  return Promise.reject(new Error('there is no Grafana server here'));
}
