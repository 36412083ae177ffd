# What the other scripts share. They run in this folder.
set -eu
cd "$(dirname "$0")"
: "${SUPERLINK:=127.0.0.1:8000}" # where nodes and commands find the superlink
# Flower would install the app's dependencies anew for every run, report usage, and look for updates.
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export PYTHONUNBUFFERED=1

# Give a process a Flower home of its own.
home() {
    export FLWR_HOME="$PWD/homes/$1"
    mkdir -p "$FLWR_HOME"
}

# Tell the command `flwr` where the superlink is; its name is `fedobp`.
connect() {
    home flwr
    printf '[superlink]\ndefault = "fedobp"\n\n[superlink.fedobp]\naddress = "%s"\nroot-certificates = "%s"\n' \
        "$SUPERLINK" "$PWD/keys/ca.crt" >"$FLWR_HOME/config.toml"
}
