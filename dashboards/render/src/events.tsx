// Draws annotations on a chart as Grafana's panels do: a dashed line, or a shaded span.
import { useEffect, useLayoutEffect, useRef } from 'react';
import { DataFrameView, type DataFrame } from '@grafana/data';
import type { UPlotConfigBuilder } from '@grafana/ui';
import type uPlot from 'uplot';

interface Event {
  time: number;
  timeEnd: number;
  color: string;
}

const VEIL = 0.1;
const FOOT = 5;

interface Props {
  builder: UPlotConfigBuilder;
  frames?: DataFrame[];
}

/** Renders nothing itself: its hooks run when the builder's chart is drawn. */
export function EventMarks({ builder, frames = [] }: Props) {
  const latest = useRef(frames);
  const chart = useRef<uPlot>(undefined);
  latest.current = frames;
  useLayoutEffect(() => {
    builder.addHook('init', (made) => {
      chart.current = made;
    });
    builder.addHook('draw', (made) => {
      for (const frame of latest.current) {
        new DataFrameView<Event>(frame).forEach((event) => mark(made, event));
      }
    });
  }, [builder]);
  useEffect(() => chart.current?.redraw(false), [frames]);
  return null;
}

function mark({ bbox, ctx, valToPos }: uPlot, { time, timeEnd, color }: Event) {
  const inside = (x: number) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, x));
  const [begin, end] = [valToPos(time, 'x', true), valToPos(timeEnd, 'x', true)];
  if (end < bbox.left || begin > bbox.left + bbox.width) {
    return;
  }
  const [left, right, bottom] = [inside(begin), inside(end), bbox.top + bbox.height];
  ctx.save();
  ctx.fillStyle = ctx.strokeStyle = color;
  ctx.globalAlpha = VEIL;
  ctx.fillRect(left, bbox.top, right - left, bbox.height);
  ctx.globalAlpha = 1;
  ctx.lineWidth = 2;
  ctx.setLineDash([5, 5]);
  for (const x of new Set([begin, end])) {
    if (x === inside(x)) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
  }
  // A mark at the bottom is visible even in a chart full of colour.
  ctx.fillRect(left - FOOT / 2, bottom, right - left + FOOT, FOOT);
  ctx.restore();
}
