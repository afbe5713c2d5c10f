"""The verbs that edit the catalog, by noun, with their options."""
