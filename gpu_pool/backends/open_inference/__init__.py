"""`oip:URL`: a model of a server with the Open Inference Protocol (V2) as a backend, such as of Triton, KServe or MLServer.

`model` reads the server's description of the model, `tensors` translates inputs and outputs, both without I/O. `endpoint`
probes and calls the server, and `joining` makes one call of several requests.
"""
