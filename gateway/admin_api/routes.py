"""All routes of the admin API."""

from gateway.admin_api import audit, customers, named_rows, operation, quotas_and_prices
from gateway.admin_api.route import AdminRoute

ROUTES: tuple[AdminRoute, ...] = (
    *named_rows.ROUTES,
    *customers.ROUTES,
    *quotas_and_prices.ROUTES,
    *operation.ROUTES,
    *audit.ROUTES,
)
