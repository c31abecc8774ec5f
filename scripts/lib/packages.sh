# Sourced after setup.sh by the scripts that build packages: what theirs have in common.
# shellcheck shell=bash disable=SC2154

# The clone that is packed: this one, or another of the project's, which is built with the tools of this one.
tree=$root
# Where what is made on the way is looked for and left, or nothing.
keep=

# common_option WORD VALUE: of those that all of the scripts take.
common_option() {
    case $1 in
    --clone)
        [ -f "$2/packaging/version.py" ] || fail "no clone of the project: $2" "packaging/version.py is not in it."
        tree=$(cd "$2" && pwd)
        ;;
    --keep)
        [ -n "$2" ] || fail "--keep needs a directory"
        mkdir -p "$2" && keep=$(cd "$2" && pwd)
        ;;
    esac
}

# Its version, 0.2.0.dev506+g1a2b3c4d. Debian's and RPM's have `~dev`, which is below 0.2.0.
package_version() { python3 -B "$tree/packaging/version.py"; }
tilde_version() { package_version | sed 's/\.dev/~dev/'; }

# The date of the commit, in seconds; where there is no git, that of the change log.
commit_date() {
    git -c safe.directory='*' -C "$tree" log -1 --format=%ct 2>/dev/null || stat -c %Y "$tree/CHANGELOG.md"
}

# Nothing is written into the clone: it may be another user's, and others may work in it. The copy has no git, and knows
# its version as an sdist does.
copy_of_the_clone() {
    mkdir "$work/clone" &&
        tar -C "$tree" --exclude=./.git --exclude=./.venv --exclude='./.*_cache' --exclude=./.hypothesis \
            --exclude=./docs/_build --exclude=./dist --exclude=__pycache__ -cf - . | tar -C "$work/clone" -xf - &&
        { [ -e "$work/clone/PKG-INFO" ] ||
            printf 'Metadata-Version: 2.4\nName: vmgahp\nVersion: %s\n' "$version" >"$work/clone/PKG-INFO"; }
}

# The sdist and the wheel that is built from it, in $work/dist-$version.
python_packages() { kept "dist-$version" build_python_packages; }
build_python_packages() {
    copy_of_the_clone && "$venv/bin/python" -m build --no-isolation --outdir "$work/dist-$version" "$work/clone"
}

# kept NAME COMMAND...: $work/NAME, which the command makes, or another run has made and left in $keep. The name tells
# what was made from what.
kept() {
    local name=$1 status=0
    shift
    if [ -z "$keep" ]; then
        "$@"
        return
    fi
    exec 9<"$keep"
    flock 9
    if [ -d "$keep/$name" ]; then
        cp -r "$keep/$name" "$work/" || status=1
    else
        rm -rf "$keep/$name.new"
        "$@" && cp -r "$work/$name" "$keep/$name.new" && mv "$keep/$name.new" "$keep/$name" || status=1
    fi
    exec 9<&-
    return $status
}
