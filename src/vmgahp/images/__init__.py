"""Disk images: formats, backing files, the catalog, qemu-img, ISO images."""

CATALOG = "catalog"
"""The prefix of a catalog image's name: ``catalog:<name>:device:permission``, no format. condor_submit demands three or
four fields (``validate_disk_param`` in HTCondor's ``src/condor_utils/submit_utils.cpp``)."""
