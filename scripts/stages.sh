# Runs the stages of a script to the end, whatever fails, and says at the end what did. To be sourced.
set -o pipefail
failed=()
last_line=
stage_log=$(mktemp)
trap 'rm -f "$stage_log"' EXIT
trap 'exit 130' INT # a stage that handles it would be followed by the next one

stage() { # COMMAND…
    if ! "$@" 2>&1 | tee -i "$stage_log"; then failed+=("$(quoted "$@")"); fi
    last_line=$(tail -n 1 "$stage_log")
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
