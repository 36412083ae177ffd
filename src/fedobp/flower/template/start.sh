#!/bin/sh
# Start the superlink and all {{ nodes }} nodes on this machine, with logs in logs/; Ctrl-C ends them.
. "$(dirname "$0")/environment.sh"
mkdir -p logs
started=""

end() {
    trap "" EXIT INT TERM HUP
    echo "ending all"
    kill $started 2>/dev/null || :
    wait
}
trap end EXIT
trap "exit 130" INT
trap "exit 143" TERM HUP

start() {
    name=$1
    shift
    "$@" >>"logs/$name.log" 2>&1 &
    started="$started $!"
}

[ -e superlink.db ] && known=yes || known=no
start superlink ./superlink.sh
superlink=$!
connect
until flwr supernode list fedobp >/dev/null 2>&1; do
    kill -0 "$superlink" 2>/dev/null || { echo "the superlink did not start: logs/superlink.log says why" >&2; exit 1; }
    sleep 1
done
[ "$known" = yes ] || ./register.sh
node=0
while [ "$node" -lt {{ nodes }} ]; do
    start "node-$node" ./node.sh "$node"
    node=$((node + 1))
done
echo "the superlink and {{ nodes }} nodes are running: ./run.sh, in another terminal, starts the federation"
wait
