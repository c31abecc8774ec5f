# Sourced by the scripts: everything that a fresh clone on a fresh Debian 12 lacks, each step with a line.
#
# A second run finds things in place and takes about a second. Nothing is assumed to have been installed by
# hand, and nothing is installed outside of Debian's packages and the clone's own .venv.
# shellcheck shell=bash disable=SC2034,SC2119,SC2120

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv

# What the clone's own .venv takes: libvirt-python is built from source.
PYTHON_PACKAGES=(libvirt-dev pkg-config gcc libc6-dev python3 python3-venv python3-dev)
# What a host needs to build libvirt-python, to run guests, and to see libvirt's own network work.
HOST_PACKAGES=(
    libvirt-daemon-system libvirt-clients libvirt-daemon-config-network dnsmasq-base iptables passt
    qemu-system-x86 qemu-utils zstd
    "${PYTHON_PACKAGES[@]}"
    util-linux iproute2
)
# What some guests of the tests need: UEFI, another architecture, a TPM, an agent; and what people describe theirs with.
GUEST_PACKAGES=(ovmf qemu-system-arm qemu-efi-aarch64 socat swtpm swtpm-tools qemu-guest-agent virtinst)
grep -qs bookworm /etc/os-release || GUEST_PACKAGES+=(virtiofsd) # Debian 12 has it with QEMU
# What VMware's vSphere simulator is built from, for the tests of the vSphere driver.
VSPHERE_PACKAGES=(golang-go golang-github-vmware-govmomi-dev)
# What runs containers, for the tests of the script driver.
CONTAINER_PACKAGES=(podman crun busybox-static)
# What draws the documents' diagrams.
DOCS_PACKAGES=(graphviz)
# The shells beside bash that have completions, which the tests ask in each.
SHELL_PACKAGES=(fish zsh)
# What else tests without a guest take: another tar and shell, signatures, a browser that measures pages.
UNIT_PACKAGES=(busybox-static gpg gpg-agent gpgv chromium-headless-shell)
# What scripts/build-deb builds with, and what its package is looked at by.
DEB_PACKAGES=(build-essential dpkg-dev debhelper dh-python lintian)
# What scripts/build-rpm builds with, and what its packages are looked at by.
RPM_PACKAGES=(rpm rpmlint checkpolicy semodule-utils binutils python3-setuptools)
# What building the pool's root takes as well, and the guests that boot in it by their own disks.
POOL_PACKAGES=(debootstrap busybox-static e2fsprogs grub-common grub-pc-bin ovmf)
# What `vmgahp image build` takes, and what makes the signatures that tests have `vmgahp image add` look at.
IMAGE_PACKAGES=(
    mmdebstrap e2fsprogs fdisk grub-common grub-efi-amd64-bin grub-pc-bin mtools qemu-utils tar util-linux
    gpg gpg-agent gpgv
)
# What building a machine with Xen, and talking to it, takes as well.
XEN_PACKAGES=(debootstrap e2fsprogs qemu-system-x86 openssh-client util-linux)
# What building a whole node, and talking to it, takes as well.
NODE_PACKAGES=(debootstrap e2fsprogs qemu-system-x86 openssh-client util-linux)

setup_log=$(mktemp "${TMPDIR:-/tmp}/vmgahp-setup.XXXXXX")
trap 'rm -f "$setup_log"' EXIT

if [ -t 2 ]; then
    red=$'\e[31m' green=$'\e[32m' dim=$'\e[2m' plain=$'\e[0m'
else
    red='' green='' dim='' plain=''
fi

# The comment at a script's head is its help.
usage() { sed -n -e '/^# shellcheck/d' -e '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; }

# The end of a script: `exec`, which runs no EXIT trap, without leaving the log behind.
hand_over() {
    rm -f "$setup_log"
    exec "$@"
}

# Progress goes to stderr: a script's stdout is its result.
say() { printf '%s\n' "$*" >&2; }

fail() {
    say "${red}$(basename "$0"): $1${plain}"
    shift
    local line
    for line in "$@"; do say "    $line"; done
    exit 1
}

# attempt WHAT COMMAND...: run a command silently; one line says what and how long, a failure shows its output.
# One that exits with 75, EX_TEMPFAIL of sysexits.h, could not look: that is neither ok nor a failure.
# The command runs as a condition, so `set -e` does not work in it: functions chain with && or return.
attempt() {
    local what=$1 began=$EPOCHREALTIME status=0
    shift
    printf '  %-58s ' "$what" >&2
    "$@" >"$setup_log" 2>&1 </dev/null || status=$?
    [ -z "${steps-}" ] || printf '%s\t%s\n' "$(_since "$began")" "$what" >>"$steps"
    case $status in
    0) say "${green}ok${plain} ${dim}$(_since "$began") s${plain}" ;;
    75) say "not checked ${dim}$(_since "$began") s${plain}" ;;
    *)
        say "${red}failed${plain} (exit $status, $(_since "$began") s)"
        tail -n 30 "$setup_log" | sed 's/^/    | /' >&2
        return 1
        ;;
    esac
}

# The same where nothing can continue after a failure.
step() { attempt "$@" || fail "this step failed: $1" "The command was: ${*:2}"; }

_since() {
    local began=${1/[.,]/} now=${EPOCHREALTIME/[.,]/}
    printf '%d.%d' $(((now - began) / 1000000)) $(((now - began) / 100000 % 10))
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# ---- Debian packages ------------------------------------------------------------------------------------

_missing_packages() {
    local package
    for package in "$@"; do
        case $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) in
        installed) ;;
        *) printf '%s\n' "$package" ;;
        esac
    done
}

_apt() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 "$@"
}

_install_packages() {
    # A list that cannot be fetched (a third party's, say) is no failure yet: the installation will tell.
    _apt update || echo "(some package lists could not be fetched)"
    _apt install --no-install-recommends "$@"
}

setup_packages() {
    command -v apt-get >/dev/null || fail "this needs Debian 12 or later: there is no apt-get here"
    local missing
    mapfile -t missing < <(_missing_packages "$@" | awk '!seen[$0]++')
    [ ${#missing[@]} -gt 0 ] || return 0
    say "  Debian packages to install: ${missing[*]}"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null ||
            fail "Debian packages are missing, and you are not root and have no sudo" \
                "As root, run: apt-get install ${missing[*]}"
        # Asks for the password now, where the question can be seen.
        sudo -v || fail "sudo does not let you install packages" "As root, run: apt-get install ${missing[*]}"
    fi
    step "installing ${#missing[@]} Debian packages" _install_packages "${missing[@]}"
}

# libvirt's driver for containers, of the version of the libvirt here, kept in $VMGAHP_LAB/lxc. It is never
# installed: a libvirtd that cannot start one of its drivers does not start at all. The tests lay it over the
# system in a namespace.
_fetch_lxc_driver() (
    directory=${VMGAHP_LAB:-/var/cache/vmgahp-lab}/lxc
    version=$(dpkg-query -W -f='${Version}' libvirt-daemon) || return 1
    as_root mkdir -p "$directory" && cd "$directory" || return 1
    compgen -G "libvirt-daemon-driver-lxc_*_*.deb" >/dev/null && return 0
    download() { as_root apt-get -q download "libvirt-daemon-driver-lxc=$version"; }
    download || { as_root apt-get -q update && download; }
)

setup_lxc_driver() { step "fetching libvirt's driver for containers" _fetch_lxc_driver; }

# Debian's kernel, unpacked in $VMGAHP_LAB/linux: what tests start Linux guests from. It is never installed.
_fetch_linux_guest() (
    directory=${VMGAHP_LAB:-/var/cache/vmgahp-lab}/linux
    compgen -G "$directory/boot/vmlinuz-*[0-9]-amd64" >/dev/null && return 0 # that for clouds has no vmgenid
    package() { apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1; }
    [ -n "$(package)" ] || as_root apt-get -q update
    as_root rm -rf "$directory.tmp"
    as_root mkdir -p "$directory.tmp" && cd "$directory.tmp" || return 1
    download() { as_root apt-get -q download "$(package)"; }
    download || { as_root apt-get -q update && download; } || return 1
    as_root dpkg -x linux-image-*.deb . && as_root rm -rf linux-image-*.deb "$directory" || return 1
    as_root mv "$directory.tmp" "$directory"
)

setup_linux_guest() { step "fetching a kernel for Linux guests" _fetch_linux_guest; }

# Debian with cloud-init as $VMGAHP_LAB/cloud-image/debian-12.qcow2, made by `vmgahp image build` and anew where that
# changed. Tests lay overlays of their own on it.
_cloud_image_key() { { cat "$root/src/vmgahp/commands/image/build.py" && declare -f _build_cloud_image; } | sha256sum; }

_cloud_image_is_current() { [ -e "$1/debian-12.qcow2" ] && [ "$(cat "$1/made-from" 2>/dev/null)" = "$(_cloud_image_key)" ]; }

_build_cloud_image() {
    local directory=$1
    as_root rm -f "$directory/made-from" &&
        as_root "$venv/bin/vmgahp" image build debian-12 --force -o "$directory/debian-12.qcow2" &&
        _cloud_image_key | as_root tee "$directory/made-from" >/dev/null
}

setup_cloud_image() {
    local directory=${VMGAHP_LAB:-/var/cache/vmgahp-lab}/cloud-image
    ! _cloud_image_is_current "$directory" || return 0
    setup_packages "${IMAGE_PACKAGES[@]}"
    as_root mkdir -p "$directory"
    exec 7<"$directory"
    flock 7 # another run may build it
    _cloud_image_is_current "$directory" || step "building an image of Debian 12 with cloud-init" _build_cloud_image "$directory"
    exec 7<&-
}

# ---- Python ---------------------------------------------------------------------------------------------

_find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# The names in pyproject's dependency groups "dev" and "docs": the pip of Debian 12 has no --group yet.
_dev_requirements() {
    "$venv/bin/python" - "$root/pyproject.toml" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]
    print("\n".join(groups["dev"] + groups["docs"]))
PYTHON
}

# What the virtual environment was made from; where nothing of it changed there is nothing to do.
_venv_key() {
    {
        printf '%s\n' "$root"
        "$venv/bin/python" --version
        cat "$root/pyproject.toml" "$root/src/vmgahp/__init__.py" "$root"/launchers/*
    } 2>/dev/null | sha256sum
}

_venv_is_current() {
    [ -x "$venv/bin/condor_vm-gahp" ] && [ -x "$venv/bin/vmgahp" ] &&
        [ "$(cat "$venv/made-from" 2>/dev/null)" = "$(_venv_key)" ]
}

_install_venv() {
    local requirements=$venv/dev-requirements.txt
    _dev_requirements >"$requirements" &&
        "$venv/bin/python" -m pip install --disable-pip-version-check -r "$requirements" -e "$root"
}

setup_venv() {
    if ! _venv_is_current; then
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            local python
            python=$(_find_python) || fail "there is no Python 3.11 or later that can make a venv" \
                "On Debian 12, run: apt-get install python3 python3-venv"
            step "creating .venv with $("$python" --version)" "$python" -m venv --clear "$venv"
        fi
        rm -f "$venv/made-from"
        step "installing vmgahp and its tools into .venv" _install_venv
        local command
        for command in condor_vm-gahp vmgahp; do
            [ -x "$venv/bin/$command" ] ||
                fail ".venv/bin/$command is not there or not executable after the installation" \
                    "Are the files in launchers/ executable? pip installs them with the mode they have."
        done
        _venv_key >"$venv/made-from"
    fi
}

# The .venv alone; one run at a time in a clone. More packages can be given.
setup_python() {
    say "Setting up:"
    exec 8<"$root"
    flock 8
    setup_packages "${PYTHON_PACKAGES[@]}" "$@"
    setup_venv
    flock -u 8
    exec 8<&-
}

# The fuzzer that sees what an input reaches. It is there for some Pythons and processors only, and nothing depends on
# it: it is tried for once in a .venv.
setup_atheris() {
    [ ! -e "$venv/atheris" ] || [ "$venv/made-from" -nt "$venv/atheris" ] || return 0
    attempt "installing atheris, or hypothesis will do" timeout 120 \
        "$venv/bin/python" -m pip install --disable-pip-version-check --only-binary :all: atheris || true
    touch "$venv/atheris"
}

# The example of all settings is what the code knows of them.
example_is_current() {
    "$venv/bin/python" "$root/docs/_ext/example_file.py" |
        diff -u "$root/config/vmgahp.conf.example" -
}

# Is anything known against what the package needs? What it has to say where it did not fail is in `audited`.
audit_lock() {
    local status=0
    audited=$(PATH=$venv/bin:$PATH "$venv/bin/python" "$root/scripts/lib/lock.py" audit) || status=$?
    [ $status != 1 ] || { printf '%s\n' "$audited" && audited=; }
    return $status
}

# How long ago everything was tried; what it has to say is in `age`.
look_at_age() {
    local status=0
    age=$(python3 "$root/scripts/lib/record.py" age) || status=$?
    [ $status = 0 ] || { printf '%s\n' "$age" && age=; }
    return $status
}

# What scripts/check does, and scripts/test first of all. All is looked at, whatever failed before; which ones did is
# in `failed_checks`.
run_checks() {
    failed_checks=
    _check "ruff check" "$venv/bin/ruff" check .
    _check "ruff format" "$venv/bin/ruff" format --check .
    _check "mypy" "$venv/bin/mypy"
    _check "lint-imports" "$venv/bin/lint-imports"
    _check "docstrings" python3 "$root/scripts/lib/docstrings.py"
    _check "config/vmgahp.conf.example" example_is_current
    _check "packaging/requirements.lock" "$venv/bin/python" "$root/scripts/lib/lock.py" fits
    _check "pip-audit" audit_lock
    [ -z "$audited" ] || say "${dim}    $audited${plain}"
    _check "tests/tried.json" look_at_age
    [ -z "$age" ] || say "${dim}    $age${plain}"
    [ -z "$failed_checks" ]
}
_check() { attempt "$@" || failed_checks+="${failed_checks:+, }$1"; }

# The documents in docs/_build: pages and man pages, where a warning is a failure. Nothing is fetched. All of it
# is read anew (-E), since pages are made from the code as well.
build_docs() {
    local builder
    for builder in html man; do
        "$venv/bin/python" -m sphinx -b $builder -E -W --keep-going -n -q -d "$root/docs/_build/doctrees" \
            "$root/docs" "$root/docs/_build/$builder" || return 1
    done
}

# ---- libvirt --------------------------------------------------------------------------------------------

_libvirt_answers() { timeout 20 virsh -q -c "$libvirt_uri" version; }

_start_libvirt() {
    if [ -d /run/systemd/system ]; then
        systemctl start libvirtd
    else
        # Without systemd: virtlogd first, which keeps the guests' consoles (and fails if it runs already), then
        # libvirtd. 8 is the set-up's lock, which a daemon must not keep.
        virtlogd -d 8<&- || echo "(virtlogd runs already?)"
        libvirtd -d 8<&- || return 1
    fi
    local deadline=$((SECONDS + 30))
    until _libvirt_answers; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.2
    done
}

# Where no udev runs, nobody has given /dev/kvm the mode that udev's rules give it. libvirt, which opens it as
# root, then sees a KVM that its own user cannot open, and examines QEMU anew, for seconds, at every call.
setup_kvm() {
    if [ -z "${VMGAHP_KEEP_KVM:-}" ] && [ -c /dev/kvm ] && [ ! -S /run/udev/control ] && [ "$(stat -c %a /dev/kvm)" != 666 ]; then
        step "letting everybody open /dev/kvm, as udev does" as_root chmod 0666 /dev/kvm
    fi
}

# As root the system's libvirtd, as anybody else one's own, which libvirt starts by itself.
setup_libvirt() {
    if [ "$(id -u)" = 0 ]; then
        libvirt_uri=qemu:///system
        _libvirt_answers >/dev/null 2>&1 || step "starting libvirtd" _start_libvirt
    else
        libvirt_uri=qemu:///session
        step "libvirt's session daemon answers" _libvirt_answers
    fi
}

# ---- all of it ------------------------------------------------------------------------------------------

# setup [PACKAGE...]: Debian packages (the given ones too), .venv and libvirt; one run at a time in a clone.
setup() {
    local began=$EPOCHREALTIME
    say "Setting up:"
    exec 8<"$root"
    flock 8
    setup_packages "${HOST_PACKAGES[@]}" "$@"
    setup_venv
    setup_kvm
    setup_libvirt
    flock -u 8
    exec 8<&-
    say "  ready ${dim}($(_since "$began") s)${plain}"
}
