"""One file per backend; `groups._registry` names them."""
