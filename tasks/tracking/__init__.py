"""MLflow tracking: the only package that imports MLflow.

``locations``: where a run is tracked. ``client``: MLflow on a store that can be moved. ``models``: evaluated policies
and the registry. ``tracker``: the background thread. ``flowmill.tasks.metrics.tracked`` reads the content from
artifacts.
"""
