// From a classic dashboard JSON to a scene of @grafana/scenes.
import type { AnnotationQuery, DataTransformerConfig, FieldConfigSource } from '@grafana/data';
import {
  behaviors,
  dataLayers,
  DataSourceVariable,
  EmbeddedScene,
  QueryVariable,
  SceneControlsSpacer,
  SceneDataLayerSet,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneRefreshPicker,
  SceneTimePicker,
  SceneTimeRange,
  SceneVariableSet,
  VariableValueSelectors,
  VizPanel,
  type SceneVariable,
} from '@grafana/scenes';
import type { Query } from './answers';
import drawn from './drawn.json';
import { UID } from './prometheus';
import { report } from './report';

interface GridPos {
  x: number;
  y: number;
  w: number;
  h: number;
}

interface Panel {
  type: string;
  id: number;
  title: string;
  description?: string;
  gridPos: GridPos;
  targets?: Query[];
  transformations?: DataTransformerConfig[];
  options?: object;
  fieldConfig?: FieldConfigSource;
  panels?: Panel[];
}

interface Variable {
  type: string;
  name: string;
  label: string;
  query: string | { query: string; refId: string };
  allValue?: string;
  includeAll: boolean;
  multi: boolean;
  refresh: number;
  sort: number;
}

export interface Dashboard {
  title: string;
  graphTooltip: number;
  panels: Panel[];
  templating: { list: Variable[] };
  annotations: { list: AnnotationQuery[] };
}

/** The view: a time range, and values of variables; the others are All. */
export interface View {
  from: string;
  to: string;
  chosen: Record<string, string>;
}

const SOURCE = { type: 'prometheus', uid: UID };

export function sceneOf(dashboard: Dashboard, { from, to, chosen }: View): EmbeddedScene {
  return new EmbeddedScene({
    $timeRange: new SceneTimeRange({ from, to, timeZone: 'utc' }),
    $variables: new SceneVariableSet({
      variables: dashboard.templating.list.map((variable) => variableOf(variable, chosen[variable.name])),
    }),
    $data: new SceneDataLayerSet({ layers: dashboard.annotations.list.map(layerOf) }),
    $behaviors: [new behaviors.CursorSync({ key: 'sync', sync: dashboard.graphTooltip })],
    controls: [
      new VariableValueSelectors({}),
      new SceneControlsSpacer(),
      new SceneTimePicker({}),
      new SceneRefreshPicker({}),
    ],
    body: new SceneGridLayout({ children: rowsOf(dashboard.panels), isLazy: false }),
  });
}

function variableOf(variable: Variable, chosen?: string): SceneVariable {
  known('variables', variable.type, variable.name);
  const { name, label } = variable;
  if (variable.type === 'datasource') {
    return new DataSourceVariable({ name, label, pluginId: SOURCE.type, value: UID, text: 'Prometheus' });
  }
  return new QueryVariable({
    name,
    label,
    query: variable.query,
    datasource: SOURCE,
    allValue: variable.allValue,
    includeAll: variable.includeAll,
    isMulti: variable.multi,
    refresh: variable.refresh,
    sort: variable.sort,
    value: [chosen ?? '$__all'],
    text: [chosen ?? 'All'],
  });
}

function layerOf(annotation: AnnotationQuery): dataLayers.AnnotationsDataLayer {
  const query = { ...annotation, datasource: SOURCE };
  return new dataLayers.AnnotationsDataLayer({ name: annotation.name, isEnabled: annotation.enable, query });
}

/** Rows with their panels; opens collapsed rows and moves the panels below them down. */
function rowsOf(panels: Panel[]): SceneGridRow[] {
  const rows: SceneGridRow[] = [];
  let shift = 0;
  for (const panel of panels) {
    const y = panel.gridPos.y + shift;
    if (panel.type === 'row') {
      const inside = panel.panels ?? [];
      const children = inside.map((one) => itemOf(one, shift));
      rows.push(new SceneGridRow({ key: `row-${panel.id}`, title: panel.title, y, children }));
      const bottoms = inside.map(({ gridPos }) => gridPos.y + gridPos.h);
      shift += Math.max(0, ...bottoms.map((bottom) => bottom - panel.gridPos.y - 1));
    } else {
      const row = rows.at(-1)!;
      row.setState({ children: [...row.state.children, itemOf(panel, shift)] });
    }
  }
  return rows;
}

function itemOf(panel: Panel, shift: number): SceneGridItem {
  const { x, y, w, h } = panel.gridPos;
  return new SceneGridItem({ x, y: y + shift, width: w, height: h, body: panelOf(panel) });
}

function panelOf(panel: Panel): VizPanel {
  const { title, description, options, fieldConfig, targets = [], transformations = [] } = panel;
  known('panels', panel.type, title);
  transformations.forEach(({ id }) => known('transformations', id, title));
  targets.forEach(({ format }) => known('formats', format ?? 'time_series', title));
  const queries = targets.map((target) => ({ ...target, datasource: SOURCE }));
  const runner = new SceneQueryRunner({ datasource: SOURCE, queries });
  return new VizPanel({
    key: `panel-${panel.id}`,
    pluginId: panel.type,
    title,
    description,
    options,
    fieldConfig,
    $data: transformations.length > 0 ? new SceneDataTransformer({ $data: runner, transformations }) : runner,
  });
}

function known(what: 'formats' | 'panels' | 'transformations' | 'variables', kind: string, name: string) {
  if (!(kind in drawn[what])) {
    report.problems.push(`${name}: of the kind ${kind}, which is not among the ${what} that are drawn here`);
  }
}
