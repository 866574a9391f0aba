# shellcheck shell=bash disable=SC2154 # the upper part sets the variables
# The file with the verdict on the newest attempt; nothing, where it has none.
verdict() {
    local attempts=("$RUN_DIR"/attempts/[0-9]*/)
    [ ! -f "${attempts[-1]}verdict.json" ] || echo "${attempts[-1]}verdict.json"
}

# What the agents decided last: done, give up, leave, ...; nothing, where the newest attempt has no verdict, or the one
# that was there before they began ($1).
decision() {
    local newest
    newest=$(verdict)
    [ "$newest" = "$1" ] || sed -n 's/.*"decision": "\([a-z ]*\)".*/\1/p' "$newest" 2>/dev/null || true
}
