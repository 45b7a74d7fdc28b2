"""torch's archives and DCP files, read and written as data: nothing is unpickled."""
