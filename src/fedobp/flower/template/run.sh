#!/bin/sh
# Start the federation, and follow its log. The run folder is RUN on the superlink's machine (default: run, here).
# If the server was interrupted, the same command goes on after its last round.
. "$(dirname "$0")/environment.sh"
connect
exec flwr run . fedobp --stream --run-config "folder=\"${RUN:-$PWD/run}\""
