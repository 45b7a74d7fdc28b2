"""To be imported before ranks are forked: every family and checkpoint format, which each of them would import anew."""

from modelexport.models.architecture import known_model_types
from modelexport.models.checkpoint_formats import formats

known_model_types()
formats()
