"""The kinds of policies that stages sample, train and show: one folder each.

Stages, the training loop, stores and reports call the interface of a kind and do not depend on a specific one. The
parts of artifact identities that depend on the kind are in ``flowmill.tasks.specs.modalities``. A new kind is a folder
here, an identity there, and a line in both tables there. A custom kind is a class with the methods of both, named in
``model.kind``.
"""
