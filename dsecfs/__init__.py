"""dsecfs: from bytes in a store to a mounted tree.

Knows nothing of sandboxes, of the network API or of the command line; imports point
dsec_api -> dsec_runtime -> dsecfs and never back.
"""

__version__ = "0.1.0"
