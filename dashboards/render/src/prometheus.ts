// A data source for scenes that queries Prometheus' HTTP API, without Grafana's server or plugin.
import {
  LoadingState,
  rangeUtil,
  type AnnotationEvent,
  type AnnotationQuery,
  type DataFrame,
  type DataQueryRequest,
  type DataQueryResponse,
  type MetricFindValue,
  type ScopedVars,
} from '@grafana/data';
import { RuntimeDataSource, sceneGraph, type SceneObject } from '@grafana/scenes';
import { of } from 'rxjs';
import { heatmapFrame, seriesOf, tableFrame, timeSeriesFrames, type Answer, type Query } from './answers';
import { ownerOf, report, type Asked } from './report';

export const UID = 'prometheus';

/** A query with its own step. */
interface PacedQuery extends Query {
  interval?: string;
}

/** An annotation of a dashboard in the form of Grafana's Prometheus data source. */
interface Marks extends AnnotationQuery {
  expr: string;
  step: string;
  titleFormat: string;
}

export class PrometheusSource extends RuntimeDataSource {
  /** @param scrape seconds between two scrapes, as in a data source's options. */
  constructor(private readonly scrape: number) {
    super(UID, UID);
  }

  async query(request: DataQueryRequest<Query>): Promise<DataQueryResponse> {
    const answers = await Promise.all(request.targets.map((query) => this.answer(query, request)));
    const errors = answers.flatMap(({ error }) => (error ? [error] : []));
    return {
      data: answers.flatMap(({ frames }) => frames),
      errors,
      state: errors.length > 0 ? LoadingState.Error : LoadingState.Done,
    };
  }

  /** The values of a variable: those of a label. */
  async metricFindQuery(
    query: { query: string },
    options?: { scopedVars?: ScopedVars }
  ): Promise<MetricFindValue[]> {
    const variable = sceneOf(options?.scopedVars);
    const [, selector, label] = /^label_values\((.*), (\w+)\)$/.exec(query.query) ?? [];
    if (!label) {
      throw new Error(`variable query not understood: ${query.query}`);
    }
    const match = sceneGraph.interpolate(variable, selector, options?.scopedVars, asRegex);
    const values = await ask<string[]>(`label/${label}/values`, { 'match[]': match });
    return values.map((text) => ({ text }));
  }

  /** Converts an annotation to a query, and the response to events. */
  annotations = {
    prepareQuery: (annotation: AnnotationQuery): PacedQuery => {
      const { expr, step, titleFormat } = annotation as Marks;
      return { refId: 'Anno', expr, interval: step, legendFormat: titleFormat };
    },
    processEvents: (annotation: AnnotationQuery, frames: DataFrame[]) =>
      of(eventsOf(annotation as Marks, frames)),
  };

  private async answer(query: PacedQuery, request: DataQueryRequest<Query>) {
    const step = Math.max(
      Math.ceil(request.intervalMs / 1000),
      query.interval ? rangeUtil.intervalToSeconds(query.interval) : this.scrape
    );
    const [from, to] = [request.range.from.unix(), request.range.to.unix()];
    const scene = sceneOf(request.scopedVars);
    const expr = sceneGraph.interpolate(
      scene,
      query.expr,
      { ...request.scopedVars, ...this.times(step, to - from) },
      asRegex
    );
    const asked: Asked = { owner: ownerOf(scene), refId: query.refId, expr, series: 0 };
    report.asked.push(asked);
    try {
      // Times are multiples of the step, as in Grafana: a picture does not depend on the second.
      const [start, end] = [Math.floor(from / step) * step, Math.floor(to / step) * step];
      const answer = query.instant
        ? await ask<Answer>('query', { query: expr, time: to })
        : await ask<Answer>('query_range', { query: expr, start, end, step });
      const series = seriesOf(answer);
      asked.series = series.length;
      return { frames: framesOf(query, series, step, request.targets.length === 1) };
    } catch (error) {
      asked.error = String(error);
      return { frames: [], error: { message: asked.error, refId: query.refId } };
    }
  }

  /** Grafana's variables of time; a rate needs four scrapes. */
  private times(step: number, range: number): ScopedVars {
    const rate = Math.max(step + this.scrape, 4 * this.scrape);
    const seconds = { __interval: step, __rate_interval: rate, __range: range };
    return Object.fromEntries(
      Object.entries(seconds).map(([name, value]) => [name, { text: `${value}s`, value: `${value}s` }])
    );
  }
}

function framesOf(
  query: Query,
  series: ReturnType<typeof seriesOf>,
  step: number,
  alone: boolean
): DataFrame[] {
  switch (query.format) {
    case 'table':
      return [tableFrame(query, series, alone)];
    case 'heatmap':
      return heatmapFrame(query, series, step);
    default:
      return timeSeriesFrames(query, series, step);
  }
}

/** Neighbouring points above 0 are one event that lasts, as in Grafana's Prometheus data source. */
function eventsOf(annotation: Marks, frames: DataFrame[]): AnnotationEvent[] {
  const step = rangeUtil.intervalToMs(annotation.step);
  const events: AnnotationEvent[] = [];
  for (const { name, fields } of frames) {
    const [times, values] = fields.map((field) => field.values as number[]);
    const active = times.filter((_, index) => values[index] > 0);
    active.forEach((time, index) => {
      const last = events.at(-1);
      if (last && index > 0 && time - active[index - 1] <= step) {
        last.timeEnd = time;
      } else {
        events.push({ time, timeEnd: time, title: name });
      }
    });
  }
  return events;
}

async function ask<Data>(path: string, parameters: Record<string, string | number>): Promise<Data> {
  const body = new URLSearchParams(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  const response = await fetch(`/api/v1/${path}?${body}`);
  const { status, data, error } = await response.json();
  if (status !== 'success') {
    throw new Error(error ?? response.statusText);
  }
  return data;
}

/** Escape a variable's value for a regular expression in a PromQL string. */
function asRegex(value: unknown): string {
  const escaped = [value].flat().map((one) => String(one).replace(/[\\^$*+?.()|[\]{}/]/g, '\\\\$&'));
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

function sceneOf(variables?: ScopedVars): SceneObject {
  return variables?.__sceneObject?.value.valueOf();
}
