"""Disk images: formats, backing files, the catalog, qemu-img, ISO images."""
