"""Everything in PostgreSQL: tables, the catalog that gateways follow, and the auditor that writes one row a request."""
