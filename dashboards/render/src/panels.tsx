// Panel plugins of Grafana's own components. The plugins themselves are part of Grafana's
// server and not on npm; this file passes options and data to the components as they do.
import { createElement, type ComponentType, type ReactElement } from 'react';
import {
  cacheFieldDisplayNames,
  FieldColorModeId,
  FieldConfigProperty,
  FieldType,
  getFieldDisplayValues,
  identityOverrideProcessor,
  PanelPlugin,
  type DataFrame,
  type FieldConfigEditorBuilder,
  type FieldDisplay,
  type PanelProps,
  type ReduceDataOptions,
} from '@grafana/data';
import { registerRuntimePanelPlugin } from '@grafana/scenes';
import {
  BarGauge,
  BigValue,
  BigValueTextMode,
  TimeSeries,
  useTheme2,
  VizRepeater,
  type BarGaugeDisplayMode,
  type BigValueColorMode,
  type BigValueGraphMode,
  type BigValueJustifyMode,
  type VizRepeaterRenderValueProps,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import type {
  BarGaugeNamePlacement,
  BarGaugeValueMode,
  TableCellHeight,
  TableSortByFieldState,
  VizLegendOptions,
  VizOrientation,
} from '@grafana/schema';
import drawn from './drawn.json';
import { EventMarks } from './events';
import { Heatmap } from './heatmap';
import { withoutEditor } from './host';
import { DRAWING } from './report';

/** Register the kinds of panels that `drawn.json` lists. */
export function registerPanels() {
  const numbers = { [FieldConfigProperty.Color]: colours(FieldColorModeId.Thresholds) };
  const lines = { [FieldConfigProperty.Color]: colours(FieldColorModeId.PaletteClassic) };
  register('bargauge', Bars, numbers);
  register('heatmap', Heatmap, numbers);
  register('stat', Stat, numbers);
  register('table', Table, numbers);
  register('timeseries', Graph, lines);
}

function colours(mode: FieldColorModeId) {
  return { defaultValue: { mode }, settings: { byValueSupport: true, bySeriesSupport: true } };
}

function register(
  kind: keyof typeof drawn.custom,
  panel: ComponentType<PanelProps>,
  standardOptions: object
) {
  const plugin = new PanelPlugin(framed(panel));
  plugin.useFieldConfig({
    standardOptions,
    useCustomConfig: (builder) => addOptions(builder, drawn.custom[kind]),
  });
  plugin.setDataSupport({ annotations: true, alertStates: false });
  registerRuntimePanelPlugin({ pluginId: kind, plugin });
}

/** The options that only fields of this kind of panel have, with their defaults; null means none. */
function addOptions(builder: FieldConfigEditorBuilder<object>, defaults: object) {
  for (const [path, value] of Object.entries(defaults)) {
    builder.addCustomEditor({
      ...withoutEditor,
      id: path,
      path: path as never,
      name: path,
      process: identityOverrideProcessor,
      defaultValue: value ?? undefined,
    });
  }
}

/** Wrap a panel in an element that the report finds; without data it shows a text. */
function framed(panel: ComponentType<PanelProps>) {
  return function Framed(props: PanelProps) {
    const nothing =
      props.data.series.every((frame) => frame.length === 0) && !props.fieldConfig.defaults.noValue;
    return (
      <div {...{ [DRAWING]: '' }} style={{ height: '100%' }}>
        {nothing ? <p>No data</p> : createElement(panel, props)}
      </div>
    );
  };
}

// Numbers.

interface NumberOptions {
  reduceOptions: ReduceDataOptions;
  orientation: VizOrientation;
}

interface StatOptions extends NumberOptions {
  colorMode: BigValueColorMode;
  graphMode: BigValueGraphMode;
  justifyMode: BigValueJustifyMode;
  textMode: BigValueTextMode;
  wideLayout: boolean;
}

interface BarOptions extends NumberOptions {
  displayMode: BarGaugeDisplayMode;
  namePlacement: BarGaugeNamePlacement;
  showUnfilled: boolean;
  valueMode: BarGaugeValueMode;
}

function Stat(props: PanelProps<StatOptions>) {
  const theme = useTheme2();
  const { colorMode, graphMode, justifyMode, textMode, wideLayout } = props.options;
  const course = graphMode === 'area';
  return repeated(props, course, ({ value, width, height, count }) => (
    <BigValue
      theme={theme}
      value={value.display}
      sparkline={course ? value.sparkline : undefined}
      width={width}
      height={height}
      count={count}
      colorMode={colorMode}
      graphMode={graphMode}
      justifyMode={justifyMode}
      textMode={textMode === BigValueTextMode.Auto && count > 1 ? BigValueTextMode.ValueAndName : textMode}
      disableWideLayout={!wideLayout}
    />
  ));
}

function Bars(props: PanelProps<BarOptions>) {
  const theme = useTheme2();
  const { displayMode, namePlacement, showUnfilled, valueMode } = props.options;
  return repeated(props, false, ({ value, width, height, orientation, alignmentFactors }) => (
    <BarGauge
      theme={theme}
      value={value.display}
      field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
      width={width}
      height={height}
      orientation={orientation}
      alignmentFactors={alignmentFactors}
      displayMode={displayMode}
      namePlacement={namePlacement}
      showUnfilled={showUnfilled}
      valueDisplayMode={valueMode}
      itemSpacing={10}
    />
  ));
}

type Value = VizRepeaterRenderValueProps<FieldDisplay, FieldDisplay['display']>;

function repeated<Options extends NumberOptions>(
  props: PanelProps<Options>,
  sparkline: boolean,
  render: (value: Value & { alignmentFactors: FieldDisplay['display'] }) => ReactElement
) {
  const theme = useTheme2();
  const { data, fieldConfig, options, replaceVariables, timeZone } = props;
  const values = () =>
    getFieldDisplayValues({
      data: data.series,
      fieldConfig,
      reduceOptions: options.reduceOptions,
      replaceVariables,
      sparkline,
      theme,
      timeZone,
    });
  return (
    <VizRepeater<FieldDisplay, FieldDisplay['display']>
      source={data}
      getValues={values}
      getAlignmentFactors={widest}
      renderValue={(value) => render({ ...value, alignmentFactors: value.alignmentFactors })}
      renderCounter={props.renderCounter}
      width={props.width}
      height={props.height}
      orientation={options.orientation}
      itemSpacing={10}
      minVizHeight={14}
      autoGrid
    />
  );
}

/** The longest title and text; all bars leave room for them, so that they are aligned. */
function widest(values: FieldDisplay[]): FieldDisplay['display'] {
  const longest = (texts: string[]) =>
    texts.reduce((one, other) => (other.length > one.length ? other : one), '');
  const parts = ({ display: { prefix = '', suffix = '', text } }: FieldDisplay) => prefix + text + suffix;
  return {
    numeric: 0,
    title: longest(values.map(({ display }) => display.title ?? '')),
    text: longest(values.map(parts)),
  };
}

// Over time.

interface GraphOptions {
  legend: VizLegendOptions;
}

function Graph({ data, height, options, timeRange, timeZone, width }: PanelProps<GraphOptions>) {
  return (
    <TimeSeries
      frames={data.series.map(finite)}
      structureRev={data.structureRev}
      timeRange={timeRange}
      timeZone={timeZone}
      width={width}
      height={height}
      legend={options.legend}
      options={options}
    >
      {(builder) => <EventMarks builder={builder} frames={data.annotations} />}
    </TimeSeries>
  );
}

/** Remove values that have no place on an axis: the line breaks there. */
function finite(frame: DataFrame): DataFrame {
  const fields = frame.fields.map((field) =>
    field.type === FieldType.number
      ? { ...field, values: field.values.map((value: number) => (Number.isFinite(value) ? value : null)) }
      : field
  );
  return { ...frame, fields };
}

// Tables.

interface TableOptions {
  cellHeight: TableCellHeight;
  showHeader: boolean;
  sortBy: TableSortByFieldState[];
}

function Table({ data, fieldConfig, height, options, timeRange, width }: PanelProps<TableOptions>) {
  const [frame] = data.series;
  cacheFieldDisplayNames([frame]);
  return (
    <TableNG
      data={frame}
      structureRev={data.structureRev}
      fieldConfig={fieldConfig}
      timeRange={timeRange}
      width={width}
      height={height}
      cellHeight={options.cellHeight}
      noHeader={!options.showHeader}
      sortBy={options.sortBy}
      getActions={() => []}
    />
  );
}
