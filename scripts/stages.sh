# Runs the stages of a script to the end, whatever fails, and says at the end what did. To be sourced.
set -o pipefail
failed=()
last_line=
stage_log=$(mktemp)
started= started_log=
trap 'rm -f "$stage_log" "$started_log"; [ -z "$started" ] || kill -- "-$started" 2>/dev/null' EXIT
trap 'exit 130' INT # a stage that handles it would be followed by the next one

stage() { # COMMAND…
    if ! "$@" 2>&1 | tee -i "$stage_log"; then failed+=("$(quoted "$@")"); fi
    last_line=$(tail -n 1 "$stage_log")
}

# Starts one stage beside those that follow, which alone would leave a core idle. What it said comes with join.
start() { # COMMAND…
    started_command=$(quoted "$@")
    started_log=$(mktemp)
    setsid "$@" >"$started_log" 2>&1 &
    started=$!
}

join() {
    wait "$started" || failed+=("$started_command")
    started=
    last_line=$(tail -n 1 "$started_log")
    cat "$started_log"
    rm "$started_log"
}

quoted() { # WORD…: as a shell takes them
    local word
    for word; do [[ $word =~ ^[[:alnum:]_./=:-]+$ ]] || word=${word@Q}; printf '%s ' "$word"; done
}

# Ends the script: with the commands that repeat what failed, and the last line of the last stage below them.
report() {
    [ ${#failed[@]} -gt 0 ] || exit 0
    printf 'cloudtrain: failed, to repeat: %s\n' "${failed[@]% }"
    printf '%s\n' "$last_line"
    exit 1
}
