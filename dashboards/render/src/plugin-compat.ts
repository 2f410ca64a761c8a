// Replaces @grafana/plugin-compat/datasources (see build.mjs): there is one data source.
import { getDataSourceSrv } from '@grafana/runtime';

export const getDataSourceInstance = () => getDataSourceSrv().get();
export const getDataSourceInstanceList = async () => getDataSourceSrv().getList();
export const getDataSourceInstanceSettings = async () => getDataSourceSrv().getInstanceSettings();
export const getDefaultDataSourceInstanceListItem = async () => getDataSourceSrv().getInstanceSettings();
export const registerRuntimeDataSourceInstance = () => {};
export const useDataSourceInstance = () => ({ isLoading: false });
export const useDefaultDataSourceInstanceListItem = () => ({ isLoading: false });
