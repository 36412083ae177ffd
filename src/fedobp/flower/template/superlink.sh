#!/bin/sh
# The superlink: nodes connect to it, and run.sh starts the federation on it.
# HOST=0.0.0.0 lets other machines connect; the port is that of SUPERLINK.
. "$(dirname "$0")/environment.sh"
home superlink
exec flower-superlink --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key \
    --enable-supernode-auth --host "${HOST:-127.0.0.1}" --port "${SUPERLINK##*:}" --database superlink.db
