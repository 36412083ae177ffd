#!/bin/sh
# A node: ./node.sh 0 starts the one that nodes/node-0.toml describes, with the key keys/node-0.
# SUPERLINK=HOST:8000 names the superlink's machine.
node="node-${1:?usage: ./node.sh NUMBER}"
. "$(dirname "$0")/environment.sh"
home "$node"
# The port is for the node's own processes on this machine; nodes side by side need different ones.
exec flower-supernode --root-certificates keys/ca.crt --auth-supernode-private-key "keys/$node" \
    --superlink "$SUPERLINK" --port "$((9100 + $1))" --node-config "nodes/$node.toml"
