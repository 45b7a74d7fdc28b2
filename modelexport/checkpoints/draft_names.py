"""The beginning of names of draft layers' tensors, where these are not numbered on behind the decoder layers.

Formats that keep a model's tensors among others (a training run's) know them by it.
"""

PREFIX = "mtp"
