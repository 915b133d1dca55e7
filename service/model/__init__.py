"""Models whose linear layers keep their weights compressed.

Importing it also registers packed directories with transformers (service.model.hf).
"""

from . import hf as hf
