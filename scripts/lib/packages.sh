# Sourced after setup.sh by the scripts that build packages: what theirs have in common.
# shellcheck shell=bash disable=SC2154

# The clone that is packed: this one, or another of the project's, which is built with the tools of this one.
tree=$root

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

# The sdist, and the wheel that is built from it, in $work.
python_packages() { "$venv/bin/python" -m build --no-isolation --outdir "$work" "$work/clone"; }
