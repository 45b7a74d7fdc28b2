"""To be imported before ranks are forked: every family and checkpoint format, which each of them would import anew."""

from modelexport.contents.formats import formats
from modelexport.families import known_model_types

known_model_types()
formats()
