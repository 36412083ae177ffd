#!/bin/sh
# Register public keys of nodes with the superlink, once: ./register.sh keys/node-0.pub ... (without names: all).
# The superlink keeps them in superlink.db.
. "$(dirname "$0")/environment.sh"
connect
[ $# -gt 0 ] || set -- keys/node-*.pub
for key; do
    flwr supernode register "$key" fedobp
done
