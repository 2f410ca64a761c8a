// Converts Prometheus' responses to Grafana's data frames, as Grafana's Prometheus data source does.
import {
  createDataFrame,
  DataFrameType,
  FieldType,
  type DataFrame,
  type Field,
  type Labels,
} from '@grafana/data';

/** One query of a panel, as in the dashboard's JSON. */
export interface Query {
  refId: string;
  expr: string;
  format?: string;
  instant?: boolean;
  legendFormat?: string;
}

/** One series of a response; an instant response has one point. Times are in seconds, values are text. */
export interface Series {
  metric: Labels;
  points: Array<[time: number, value: string]>;
}

/** The data of `/api/v1/query` or `/api/v1/query_range`. */
export interface Answer {
  resultType: 'matrix' | 'scalar' | 'vector';
  result: unknown;
}

export function seriesOf(answer: Answer): Series[] {
  if (answer.resultType === 'scalar') {
    return [{ metric: {}, points: [answer.result as [number, string]] }];
  }
  type Row = { metric: Labels; value?: [number, string]; values?: Array<[number, string]> };
  return (answer.result as Row[]).map(({ metric, value, values }) => ({
    metric,
    points: values ?? [value!],
  }));
}

/** One frame per series, named by its legend; from `step` Grafana knows where points are missing. */
export function timeSeriesFrames(query: Query, series: Series[], step: number): DataFrame[] {
  return series.map(({ metric, points }) => {
    const name = legend(query, metric);
    return createDataFrame({
      refId: query.refId,
      name,
      meta: { type: DataFrameType.TimeSeriesMulti },
      fields: [timeField(points, step), numberField('Value', points, { labels: metric, name })],
    });
  });
}

/** One row per series, one column per label; the column of values has the query's letter if there are several. */
export function tableFrame(query: Query, series: Series[], alone: boolean): DataFrame {
  const names = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))];
  const points = series.map((one) => one.points[0]);
  const labels = names.map((name) => ({
    name,
    type: FieldType.string,
    config: {},
    values: series.map(({ metric }) => metric[name] ?? ''),
  }));
  const value = numberField(alone ? 'Value' : `Value #${query.refId}`, points);
  return createDataFrame({ refId: query.refId, fields: [timeField(points), ...labels, value] });
}

/** Buckets in order, each minus the one below: Prometheus' buckets are cumulative, a heatmap's are not. */
export function heatmapFrame(query: Query, series: Series[], step: number): DataFrame[] {
  const buckets = series
    .map((one) => ({ bound: numberOf(one.metric.le), counts: new Map(one.points) }))
    .sort((one, other) => one.bound - other.bound);
  const times = [...new Set(series.flatMap(({ points }) => points.map(([time]) => time)))].sort(
    (a, b) => a - b
  );
  if (buckets.length === 0) {
    return [];
  }
  const rows = buckets.map(({ bound, counts }, index) => {
    const below = index > 0 ? buckets[index - 1].counts : undefined;
    const alone = (time: number) => numberOf(counts.get(time)) - (below ? numberOf(below.get(time)) : 0);
    return {
      name: String(bound),
      type: FieldType.number,
      config: {},
      values: times.map((time) => Math.max(0, alone(time))),
    };
  });
  const time = timeField(
    times.map((at) => [at, '']),
    step
  );
  return [
    createDataFrame({
      refId: query.refId,
      meta: { type: DataFrameType.HeatmapRows },
      fields: [time, ...rows],
    }),
  ];
}

function timeField(points: Series['points'], step?: number): Field {
  return {
    name: 'Time',
    type: FieldType.time,
    config: step ? { interval: step * 1000 } : {},
    values: points.map(([time]) => time * 1000),
  };
}

function numberField(
  name: string,
  points: Series['points'],
  shown?: { labels: Labels; name: string }
): Field {
  return {
    name,
    type: FieldType.number,
    config: shown ? { displayNameFromDS: shown.name } : {},
    labels: shown?.labels,
    values: points.map(([, value]) => numberOf(value)),
  };
}

function numberOf(value: string | undefined): number {
  return value === '+Inf' ? Infinity : value === '-Inf' ? -Infinity : parseFloat(value ?? 'NaN');
}

function legend({ legendFormat, expr }: Query, metric: Labels): string {
  if (legendFormat && legendFormat !== '__auto') {
    return legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label: string) => metric[label] ?? '');
  }
  const { __name__: name = '', ...labels } = metric;
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return pairs.length > 0 ? `${name}{${pairs.join(', ')}}` : name || expr;
}
