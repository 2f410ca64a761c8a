// A heatmap of buckets. Grafana's own is a plugin and not on npm: the axes here are Grafana's, and this file
// paints the cells in the colours of Grafana's heatmap.
import { useMemo } from 'react';
import {
  formattedValueToString,
  getValueFormat,
  type DataFrame,
  type GrafanaTheme2,
  type PanelProps,
} from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, useTheme2 } from '@grafana/ui';
import { interpolateOranges } from 'd3-scale-chromatic';
import type uPlot from 'uplot';
import { EventMarks } from './events';

interface Options {
  color: { steps: number };
  filterValues: { le: number };
  yAxis: { unit: string };
}

const LEGEND_HEIGHT = 24;
const LABEL_HEIGHT = 16;

export function Heatmap({ data, height, options, timeRange, timeZone, width }: PanelProps<Options>) {
  const theme = useTheme2();
  const [frame] = data.series;
  const most = Math.max(...rowsOf(frame).flat().filter(Number.isFinite));
  const colours = useMemo(() => palette(options.color.steps, theme), [options, theme]);
  const builder = useMemo(() => {
    const made = new UPlotConfigBuilder(timeZone);
    const range = (): [number, number] => [timeRange.from.valueOf(), timeRange.to.valueOf()];
    addAxes(made, frame, options.yAxis.unit, range, theme);
    made.addHook('draw', (chart) => paint(chart, frame, options.filterValues.le, most, colours));
    return made;
  }, [frame, timeRange, timeZone, options, theme, most, colours]);
  return (
    <>
      <UPlotChart config={builder} data={chartData(frame)} width={width} height={height - LEGEND_HEIGHT}>
        <EventMarks builder={builder} frames={data.annotations} />
      </UPlotChart>
      <Legend most={most} colours={colours} />
    </>
  );
}

/** The counts of each bucket, lowest bucket first. */
function rowsOf(frame: DataFrame): number[][] {
  return frame.fields.slice(1).map(({ values }) => values);
}

/** The chart needs a line: an invisible one. */
function chartData(frame: DataFrame): uPlot.AlignedData {
  const times: number[] = frame.fields[0].values;
  return [times, times.map(() => null)];
}

/** Colours from few to many; on a dark background few are dark, because Grafana reverses the scheme there. */
function palette(steps: number, theme: GrafanaTheme2): string[] {
  const colours = Array.from({ length: steps }, (_, index) => interpolateOranges(index / (steps - 1)));
  return theme.isDark ? colours.reverse() : colours;
}

function addAxes(
  builder: UPlotConfigBuilder,
  frame: DataFrame,
  unit: string,
  range: () => [number, number],
  theme: GrafanaTheme2
) {
  const bounds = frame.fields.slice(1).map(({ name }) => Number(name));
  const format = getValueFormat(unit);
  const label = (bound: number) => (Number.isFinite(bound) ? formattedValueToString(format(bound)) : '+Inf');
  builder.addScale({
    scaleKey: 'x',
    isTime: true,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range,
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Up,
    range: [0, bounds.length],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, theme });
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    theme,
    // A bucket's bound is its upper edge; if rows are low, only some have labels.
    splits: ({ height }) => {
      const every = Math.ceil((LABEL_HEIGHT * bounds.length) / height);
      return bounds.map((_, index) => index + 1).filter((edge) => (bounds.length - edge) % every === 0);
    },
    values: (_, edges) => edges.map((edge) => label(bounds[edge - 1])),
  });
  builder.addSeries({ scaleKey: 'y', theme, show: false });
}

function paint(chart: uPlot, frame: DataFrame, least: number, most: number, colours: string[]) {
  const times: number[] = frame.fields[0].values;
  const step = frame.fields[0].config.interval ?? 0;
  const across = (time: number) => Math.round(chart.valToPos(time, 'x', true));
  const up = (edge: number) => Math.round(chart.valToPos(edge, 'y', true));
  const { bbox, ctx } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  rowsOf(frame).forEach((counts, row) => {
    const [top, bottom] = [up(row + 1) + 1, up(row)];
    counts.forEach((count, index) => {
      if (count > least) {
        // A point covers the time before it.
        const [left, right] = [across(times[index] - step), across(times[index])];
        ctx.fillStyle = colours[Math.round((count / most) * (colours.length - 1))];
        ctx.fillRect(left, top, right - left, bottom - top);
      }
    });
  });
  ctx.restore();
}

function Legend({ most, colours }: { most: number; colours: string[] }) {
  const bar = { background: `linear-gradient(to right, ${colours.join()})`, height: 8, width: 120 };
  const line = { alignItems: 'center', display: 'flex', fontSize: 12, gap: 8, height: LEGEND_HEIGHT };
  return (
    <div style={line}>
      0 <div style={bar} /> {formattedValueToString(getValueFormat('short')(most))}
    </div>
  );
}
