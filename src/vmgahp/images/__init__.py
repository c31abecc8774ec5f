"""Disk images: formats, backing files, the catalog, qemu-img, ISO images."""

CATALOG = "catalog"
"""The prefix of the name of an image of this machine's catalog: ``catalog:<name>:device:permission``, no
format. condor_submit demands three or four fields (``validate_disk_param`` in HTCondor's
``src/condor_utils/submit_utils.cpp``)."""
