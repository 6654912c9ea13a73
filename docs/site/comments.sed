# Makes Doxygen's comments of plain ones. What is indented in a comment is code.
/^[[:space:]]*\/\/   / {
  s/^([[:space:]]*)\/\/   /\1\/\/\/       /
  b
}
/^[[:space:]]*\/\/( |$)/ {
  s/[\\@<>#%]/\\&/g
  s/^([[:space:]]*)\/\//\1\/\/\//
  b
}
s/^(.*[;,{][[:space:]]*)\/\/ (.*)$/\1\/\/\/< \2/
