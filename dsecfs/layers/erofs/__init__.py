"""EROFS metadata images: written and read in Python, mounted by the kernel.

An image holds a layer's tree (inodes, names, attributes); file data lies in the layer's
blobs, which are the image's extra devices. `format.py` has the constants, `writer.py`
makes an image from a tree, `reader.py` looks into one lazily. docs/formats-erofs.md
describes every byte we write.
"""
