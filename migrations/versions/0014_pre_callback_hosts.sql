ALTER TABLE customers ADD COLUMN callback_hosts TEXT;
COMMENT ON COLUMN customers.callback_hosts IS
    'Hosts that its callbacks may go to, separated by commas, empty for no callbacks; null = the deployment''s list.';
ALTER TABLE customers ADD CONSTRAINT ck_customers_callback_hosts CHECK (
    length(callback_hosts) <= 2000
    AND callback_hosts ~* '^( *(\[[0-9a-f:.]+\]|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?)(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))? *(,|$))*$'
);
