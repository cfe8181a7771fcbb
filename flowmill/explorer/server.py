"""The server of ``flowmill view``: Streamlit's application behind the guard against pages of other origins.

``streamlit run`` detects ``app`` in this file's source and serves it.
"""

from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from flowmill.tasks.execution.guard import OwnPagesOnly

app = App(Path(__file__).with_name("page.py"), middleware=[Middleware(OwnPagesOnly)])
