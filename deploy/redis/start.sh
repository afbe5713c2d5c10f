#!/bin/sh
# Start Redis or Valkey with one user per role: users.acl with the passwords of the environment put in their places.
# Needs GATEWAY_PASSWORD, SCHEDULER_PASSWORD, WORKER_PASSWORD, SCALER_PASSWORD, ADMIN_PASSWORD. Arguments are handed to the server.
set -eu
acl=${ACL_FILE:-/tmp/users.acl}
script=
for role in GATEWAY SCHEDULER WORKER SCALER ADMIN; do
    eval "password=\${${role}_PASSWORD:?is not set}"
    # A hash, so that no password lies in a file, whatever characters it has.
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    script="$script;s/>${role}_PASSWORD/#$hash/"
done
umask 077
sed "${script#;}" "$(dirname "$0")/users.acl" >"$acl"
exec "${REDIS_SERVER:-valkey-server}" --aclfile "$acl" --maxmemory-policy noeviction --hash-max-listpack-value 4096 "$@"
