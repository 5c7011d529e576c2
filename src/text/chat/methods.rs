//! Methods of Python's strings, lists and dictionaries that templates call.

use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method of a value.
pub(super) fn call(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    pycompat::unknown_method_callback(state, value, method, arguments)
}
