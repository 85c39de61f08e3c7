import com.amazonaws.services.dynamodbv2.local.main.ServerRunner;
import com.amazonaws.services.dynamodbv2.local.server.DynamoDBProxyServer;
import java.lang.reflect.Field;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.server.ServerConnector;

/**
 * Starts DynamoDB Local on loopback. Its own main listens on every interface and has no option to say otherwise, so
 * the address of its connector is set here before it starts. Run by Janino, which PySpark ships: no compiler needed.
 */
public class LoopbackDynamoDB {
    public static void main(String[] args) throws Exception {
        DynamoDBProxyServer proxy = ServerRunner.createServerFromCommandLineArgs(args);
        Field field = DynamoDBProxyServer.class.getDeclaredField("server");
        field.setAccessible(true);
        Server server = (Server) field.get(proxy);
        ((ServerConnector) server.getConnectors()[0]).setHost("127.0.0.1");
        proxy.start();
        proxy.join();
    }
}
