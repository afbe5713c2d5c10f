SELECT version FROM catalog_version
