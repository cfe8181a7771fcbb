"""MLflow: the only room that imports it.

``places``: where a run is tracked. ``content``: what is logged, read from committed artifacts. ``client``: MLflow on a
store that can be moved. ``models``: evaluated policies and the registry. ``tracker``: the background thread.
"""
