"""The lab: real parts for tests to work with.

`guest` makes a bootable guest, `demo` shows one job with it; `vmrun` stands in for VMware's, and `vmware` is a
machine with it; `namespace` is a throw-away machine with HTCondor and libvirt in it, `pool` an HTCondor pool there.
`strict` is the pytest plugin that lets none of the tests which need these skip unnoticed.
"""
