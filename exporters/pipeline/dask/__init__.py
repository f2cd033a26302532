"""Does pieces on a Dask cluster; needs the packages of edgekv[sweep]."""
