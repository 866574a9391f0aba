# shellcheck shell=bash disable=SC2154 # the upper part sets the variables
# What the agents decided last: done, give up, leave, ...; nothing, where the newest attempt has no verdict.
decision() {
    local attempts=("$RUN_DIR"/attempts/[0-9]*/)
    sed -n 's/.*"decision": "\([a-z ]*\)".*/\1/p' "${attempts[-1]}verdict.json" 2>/dev/null || true
}
