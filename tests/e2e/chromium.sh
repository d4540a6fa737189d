#!/bin/sh
# Finds Chromium, or installs Debian's package: as root, or with a sudo that asks nothing.
# RECONCILE_CHROMIUM names another browser of its kind.
set -eu
for name in "${RECONCILE_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then exit 0; fi
done

give_up() {
    echo "e2e: no Chromium, and it cannot be installed here: $1" >&2
    echo "e2e: install the package chromium, or name a browser in RECONCILE_CHROMIUM" >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 || give_up "there is no apt-get"
if [ "$(id -u)" = 0 ]; then root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then root="sudo -n"
else give_up "this user is not root, and sudo is missing or asks for a password"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        chromium fonts-dejavu-core >"$log" 2>&1
}
echo "e2e: installing Chromium"
install || { $root apt-get update -qq >>"$log" 2>&1 && install; } ||
    { tail -5 "$log" >&2; give_up "apt-get failed"; }
