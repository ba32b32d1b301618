"""Feature extractors on the Hugging Face Hub. The library is imported when one of these methods is called."""

from ksm_lightning.hub.pretrained import Pretrained

__all__ = ["Pretrained"]
