# Sourced by the scripts that build a machine: what they have in common beside setup.sh.
# shellcheck shell=bash

mounts_in() { findmnt -rno TARGET | awk -v top="$1" '$0 == top || index($0, top "/") == 1' | sort -r; }

# Remove a directory in which an interrupted build, or somebody by hand, may have left something mounted: that is
# unmounted, never removed. Each mount is made private before, lest the host's /dev, bound in there, loses what is
# unmounted in the copy.
discard() {
    local directory=$1 mounted
    for mounted in $(mounts_in "$directory"); do as_root mount --make-private "$mounted"; done
    for mounted in $(mounts_in "$directory"); do as_root umount -l "$mounted"; done
    if [ -n "$(mounts_in "$directory")" ]; then
        echo "something is mounted in $directory and cannot be unmounted"
        return 1
    fi
    as_root rm -rf --one-file-system "$directory"
}
