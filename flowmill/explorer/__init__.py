"""The explorer of ``flowmill view``: a page of Streamlit that browses the samples of runs."""
